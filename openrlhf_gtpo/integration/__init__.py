"""The only room that knows OpenRLHF: its parser, experience maker, actors and trainer, extended in place of forked."""
