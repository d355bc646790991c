# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.layers.attention as A
import levanter.layers.kv_cache as KV
from haliax import NamedArray


def attend(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale, soft_cap=None):
    P, S, H2, D = kv_pages.array.shape
    N = kv_lens.array.shape[0]
    qa = q.array.astype(jnp.float32) * sm_scale  # [T, H, G, D]
    T = qa.shape[0]
    tok = jnp.arange(T)
    seq = jnp.clip(jnp.searchsorted(cu_q_lens, tok, side="right") - 1, 0, N - 1)
    valid = (seq < num_seqs) & (tok < cu_q_lens[num_seqs])
    kv_len = jnp.where(valid, kv_lens.array[seq], 0)
    pos = kv_len - (cu_q_lens[seq + 1] - tok)  # position of the query within its sequence
    pages = page_indices.array[seq]  # [T, pages]
    nblocks = (jnp.max(pos) + S) // S

    def body(i, carry):
        o, z, m = carry
        kv = kv_pages.array.at[pages[:, i]].get(mode="fill", fill_value=0)  # [T, S, 2H, D]
        k, v = kv[:, :, 0::2], kv[:, :, 1::2]
        a = jnp.einsum("thgd,tshd->thgs", qa, k)
        if soft_cap is not None:
            a = jnp.tanh(a / soft_cap) * soft_cap
        mask = ((i * S + jnp.arange(S))[None] <= pos[:, None])[:, None, None]
        a = jnp.where(mask, a, -1e10)
        m2 = jnp.maximum(m, a.max(-1))
        p = jnp.where(mask, jnp.exp(a - m2[..., None]), 0.0)
        c = jnp.exp(m - m2)
        return c[..., None] * o + jnp.einsum("thgs,tshd->thgd", p, v), c * z + p.sum(-1), m2

    o, z, _ = jax.lax.fori_loop(0, nblocks, body, (jnp.zeros_like(qa), jnp.zeros(qa.shape[:3]), jnp.full(qa.shape[:3], -1e30)))
    return NamedArray((o / jnp.maximum(z, 1e-10)[..., None]).astype(q.dtype), q.axes)

def update(kv_pages, t_pages, t_slots, new_k, new_v, K):
    kv = KV._interleave_kv(new_k.astype(kv_pages.dtype), new_v.astype(kv_pages.dtype))
    t_pages = jnp.where(jnp.arange(t_pages.shape[0]) < K, t_pages, kv_pages.shape[0])
    return kv_pages.at[t_pages, t_slots].set(kv, mode="drop")
