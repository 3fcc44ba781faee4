"""A byte-level language model of about a million parameters: the task that `isthmus simulate` trains."""
