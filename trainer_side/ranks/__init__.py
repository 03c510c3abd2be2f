"""Publishing a model whose tensors are shared out among the ranks of a torch.distributed world."""
