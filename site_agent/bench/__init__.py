"""`isthmus bench`: measures the algorithms on this machine, each beside the same work done the textbook way."""
