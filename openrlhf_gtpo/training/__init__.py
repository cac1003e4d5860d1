"""Training, the only room that knows OpenRLHF: it extends its parser, experience maker, actors and trainer."""
