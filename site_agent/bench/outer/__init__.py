"""`isthmus bench outer`: what outer rounds and snapshots of large parameters cost, and whether runs resume exactly."""
