"""Datasets: loader.py and tokenizer.py are imported, each folder's prepare.py is run once."""
