"""`easel`, and `python -m app`. Nothing is imported before the command runs: a worker process reads this file again."""


def main() -> None:
    from app.output import open_standard_streams

    open_standard_streams()
    from app.cli import main as run

    run()


if __name__ == "__main__":
    main()
