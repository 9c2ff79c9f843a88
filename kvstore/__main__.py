"""`python -m kvstore` is the `kvstore` command."""

from kvstore.cli import app

if __name__ == "__main__":
    app(prog_name="kvstore")
