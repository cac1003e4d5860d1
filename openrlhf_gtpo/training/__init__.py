"""The only room that knows OpenRLHF. It extends OpenRLHF's parser, experience maker, actors and trainer; no forks."""
