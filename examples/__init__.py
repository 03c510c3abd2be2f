"""Programs that show vllm-delta-sync at work; run them from the root of a checkout."""
