"""`isthmus bench quality`: how well a small language model learns by each method, and what each sends for it."""
