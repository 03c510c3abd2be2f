"""The tensors of a training model under the names of its checkpoint, as live views.

May import ``vllm_delta_sync`` below ``engine``. Begin with ``sources``.
"""
