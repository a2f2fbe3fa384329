"""`python -m guided_smc.cli`, for where the console script is not on the path."""

from guided_smc.cli.main import main

if __name__ == "__main__":
    main()
