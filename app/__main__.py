"""`python -m app` is `easel`."""

from app.cli import main

main()
