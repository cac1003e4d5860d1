"""The command line: OpenRLHF's parser with this package's flags, and all that is refused before an engine starts."""
