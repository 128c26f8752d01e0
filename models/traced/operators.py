"""The operators that a graph may hold: all that a device computes of a model that it was sent.

Each takes tensors and numbers and returns tensors. None reads or writes files, reaches other memory or runs code. What
an operator does to dimensions stands in the files of rules; those of `OPAQUE` are followed by none, so that whatever
they read is never cut.
"""

from __future__ import annotations

from typing import Any

import torch

GETITEM = "getitem"  # one of several results: no operator of PyTorch's


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of these the result has an entry per entry of the arguments, which are broadcast.
ELEMENTWISE = _names(
    """
    abs abs_ acos acosh add add_ asin asinh atan atan2 atanh ceil clamp clamp_ clamp_max clamp_max_ clamp_min
    clamp_min_ clone celu celu_ copysign cos cosh div div_ elu elu_ eq erf exp exp2 exp_ expm1 floor floor_
    floor_divide fmax fmin fmod frac ge gelu gelu_ gt hardshrink hardsigmoid hardsigmoid_ hardswish hardswish_
    hardtanh hardtanh_ heaviside hypot isfinite isinf isnan le leaky_relu leaky_relu_ lerp log log10 log1p log2
    log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill masked_fill_ max
    maximum min minimum mish mish_ mul mul_ ne neg neg_ bitwise_and bitwise_not bitwise_or bitwise_xor __and__
    __or__ __xor__ rsub reciprocal relu relu6 relu6_ relu_ remainder round rrelu rrelu_ rsqrt selu selu_ sgn
    sigmoid sigmoid_ sign silu silu_ sin sinc sinh softplus softshrink sqrt square sub sub_ tan tanh tanh_
    threshold threshold_ trunc where xlogy addcmul addcdiv pow pow_ erfinv _weight_norm
    absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip clip_ complex deg2rad digamma divide erfc fix
    float_power greater greater_equal isclose isneginf isposinf isreal ldexp less less_equal lgamma log1p_ log_
    multiply negative nextafter normal not_equal poisson polar rad2deg reciprocal_ rsqrt_ signbit special_entr
    special_erf special_expit special_i0 special_log1p sqrt_ square_ subtract true_divide __lshift__ __rshift__
    """
)
# Of these it has the layout of the first argument.
SAME = _names(
    """
    alias alpha_dropout alpha_dropout_ bernoulli bernoulli_ contiguous detach detach_ dropout dropout_
    empty_like feature_alpha_dropout feature_dropout feature_dropout_ fill_ float full_like lift_fresh_copy
    log_softmax logsigmoid nan_to_num normal_ ones_like rand_like randn_like softmax softmax_ to to_copy
    _to_copy type_as uniform_ zero_ zeros_like tril triu tril_ triu_ cumsum positive _conj resolve_conj
    exponential_ cauchy_ geometric_ log_normal_ random_ real imag angle
    """
)
CREATION = _names(
    """
    empty full new_empty new_full new_ones new_zeros ones rand randint randn zeros
    """
)
CONSTANT = _names(
    """
    arange eye fft_fftfreq hann_window linspace logspace randperm scalar_tensor tril_indices triu_indices
    """
)
REDUCTION = _names(
    """
    all amax amin any argmax argmin count_nonzero linalg_vector_norm logsumexp mean nanmean nansum norm prod std
    std_mean sum var var_mean
    """
)
POOLING = _names(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool2d_with_indices max_pool3d upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    adaptive_max_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    """
)
VIEWS = _names(
    """
    _reshape_alias _unsafe_view flatten ravel reshape reshape_as squeeze squeeze_ unflatten unsqueeze unsqueeze_ view
    view_as
    """
)
CONVOLUTIONS = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    """
)
NORMS = _names(
    """
    batch_norm group_norm instance_norm layer_norm rms_norm
    """
)
OTHERS = _names(
    """
    addmm baddbmm bmm cat chunk concat concatenate copy_ dot einsum embedding expand expand_as flip glu gru index
    index_select linear lstm matmul max min mm moveaxis movedim mv narrow numpy_T pad constant_pad_nd permute
    pixel_shuffle repeat repeat_interleave roll scaled_dot_product_attention select slice split split_with_sizes
    stack swapaxes swapdims t prelu tensor_split transpose transpose_ unbind rnn_tanh rnn_relu channel_shuffle
    adjoint broadcast_tensors broadcast_to embedding_bag gru_cell hstack lstm_cell matrix_H mH mT
    pixel_unshuffle rnn_relu_cell rnn_tanh_cell tile unsafe_chunk vdot view_as_complex view_as_real
    """
)
FOURIER = _names(
    """
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
    fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    """
)
OPAQUE = _names(
    """
    diff affine_grid_generator argsort bucketize cosine_similarity cross cummax cummin cumprod diagonal
    gather grid_sampler im2col col2im
    kthvalue linalg_inv linalg_matrix_exp linalg_norm linalg_solve logcumsumexp masked_scatter median meshgrid
    max_unpool1d max_unpool2d multinomial one_hot outer reflection_pad1d reflection_pad2d
    replication_pad1d replication_pad2d rot90 scatter scatter_add searchsorted sort take_along_dim tensordot topk
    bilinear unfold cdist trace inverse index_add index_put index_put_ masked_select
    addbmm addmv addr aminmax block_diag cartesian_prod chain_matmul column_stack cumulative_trapezoid diag diag_embed
    diagonal_scatter dstack fill_diagonal_ fliplr flipud fractional_max_pool2d ger gradient hsplit index_add_
    index_copy index_fill inner istft kron linalg_cholesky linalg_cross linalg_det linalg_eigh linalg_matrix_norm
    linalg_matrix_power linalg_multi_dot linalg_pinv linalg_qr linalg_slogdet linalg_solve_triangular linalg_svd
    linalg_vecdot logdet masked_scatter_ matrix_exp mode msort nanmedian pairwise_distance pdist quantile
    reflection_pad3d renorm replication_pad3d scatter_ scatter_add_ scatter_reduce select_scatter slice_scatter stft
    sum_to_size take trapezoid vander vsplit vstack
    """
)
ALLOWED = frozenset().union(
    ELEMENTWISE, SAME, CREATION, CONSTANT, REDUCTION, POOLING, VIEWS, CONVOLUTIONS, NORMS, FOURIER, OTHERS, OPAQUE
)
# The results of these are always new memory. Any other operator may return an argument itself, even if its schema names
# no view: dropout in evaluation does, and einsum of a single operand.
FRESH = ELEMENTWISE - {"normal"} | CREATION | CONSTANT | REDUCTION | POOLING | CONVOLUTIONS | NORMS
FRESH |= _names(
    """
    addbmm addmm addmv addr baddbmm bilinear bmm cat cdist column_stack concat concatenate constant_pad_nd cumsum dot
    dstack embedding embedding_bag empty_like flip full_like gather glu gru gru_cell hstack index index_add index_copy
    index_fill index_put index_select linear log_softmax lstm lstm_cell masked_scatter masked_select matmul mm mv
    nan_to_num one_hot ones_like outer pad prelu rand_like randn_like reflection_pad1d reflection_pad2d repeat
    repeat_interleave replication_pad1d replication_pad2d rnn_relu rnn_tanh roll scaled_dot_product_attention scatter
    scatter_add softmax sort stack tensordot tile topk tril triu vstack zeros_like
    """
)

Operator = torch._ops.OpOverload


def operator_named(text: str) -> Operator:
    """Return an operator by its name and overload, such as "conv2d.default"; ValueError if it is not allowed."""
    name, dot, overload = text.partition(".")
    if name not in ALLOWED or not dot or not overload.isidentifier():
        raise ValueError(f"the operator {text!r:.80} is none that a graph may hold")
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"the operator {text!r:.80} does not exist in PyTorch {torch.__version__}")
    written = [argument for argument in found._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if any(str(argument.type) != "Tensor" for argument in written):
        raise ValueError(f"the operator {text!r:.80} changes a list, which a graph may not hold")
    return found


def short_name(target: Any) -> str:
    """Return the name of what a node calls, without library and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", target))


def full_name(target: Operator) -> str:
    """Return the name by which `operator_named` finds an operator."""
    return f"{short_name(target)}.{target._overloadname}"
