"""The only room that knows OpenRLHF: its parser, experience maker, actors and trainer are extended, not forked."""
