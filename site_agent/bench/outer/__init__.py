"""`isthmus bench outer`: what an outer round of large parameters costs, beside every site sending everything."""
