"""The command line: OpenRLHF's parser with this package's flags, and everything refused before an engine starts."""
