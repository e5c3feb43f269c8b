"""`python -m transformer_xl`, the same as `txl`; what `torchrun -m` takes."""

import os
import sys

if __name__ == "__main__":
    try:
        from transformer_xl.cli import main
        from transformer_xl.process import have_met
    except KeyboardInterrupt:  # later ones end in `main`
        sys.exit(130)
    try:
        main()
    except SystemExit as end:
        if have_met() and not isinstance(end.code, str):  # threads of the connection may still run, and would abort the exit
            os._exit(end.code or 0)
        raise
