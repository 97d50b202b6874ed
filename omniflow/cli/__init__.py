"""The command `omniflow`: run, check, explain and draw graphs; fetch their models; look at the machine."""

from __future__ import annotations


def main() -> int:
    """Run the command line; returns the exit code."""
    # Every host process imports the script that calls this: it must not cost it typer and rich (0.2 s).
    from omniflow.cli.app import run_command_line

    return run_command_line()
