"""`isthmus chaos`: a run of three sites on this machine while everything is killed, cut and garbled by a schedule."""
