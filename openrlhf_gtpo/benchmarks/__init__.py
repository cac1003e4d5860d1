"""What measures: one harness, and one file a question. Only the command line imports it."""
