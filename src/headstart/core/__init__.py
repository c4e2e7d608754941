"""Pure: prompts, blocks, index, retention, planner, explanations. No I/O, no clocks, no globals."""
