"""What a run may do besides training, a folder each (see ``training/feature.py``)."""
