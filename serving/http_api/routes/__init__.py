"""One file per endpoint; `app.py` lists them."""
