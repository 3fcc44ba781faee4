"""`isthmus bench rounds`: what a round of several sites costs, beside bare sockets and a bare gloo all-gather."""
