"""`python -m transformer_xl`, the same as `txl`; what `torchrun -m` takes."""

from transformer_xl.cli import main

if __name__ == "__main__":
    main()
