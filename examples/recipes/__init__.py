"""Publishing from other trainers: adapters to copy from. docs/recipes.md says what each was written against."""
