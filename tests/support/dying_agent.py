"""The silo agent's own process, which sends itself SIGKILL right after an optimizer step of its choice.

python -m tests.support.dying_agent STEP start --data DIR ...
"""

import sys

from silo_agent.cli import main
from silo_agent.training.loss_log import LossLog
from tests.support.checkpointed_training import dying_at

if __name__ == "__main__":
    LossLog.add = dying_at(int(sys.argv.pop(1)), LossLog.add)  # type: ignore[method-assign]
    main()
