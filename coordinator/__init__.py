"""The coordinator: runs, rounds and the log. It imports no torch, and never `site_agent`."""
