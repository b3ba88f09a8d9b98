"""The demonstration: a small GPT-2 trained on real text under several memory budgets. `python -m demo.train_gpt2`."""
