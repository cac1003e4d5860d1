"""What measures: one file a question. Only the command line knows it."""
