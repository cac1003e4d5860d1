"""The command line: OpenRLHF's parser with this package's flags, and what follows from them on this host."""
