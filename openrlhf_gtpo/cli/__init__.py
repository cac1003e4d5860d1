"""Command lines: parse, check, call. Nothing else lives here."""
