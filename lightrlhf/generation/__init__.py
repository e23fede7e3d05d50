"""Generation: the engine, rollouts, dialogues and their users, clients of servers."""
