"""What evaluations run on: models, texts, prompts, packages."""
