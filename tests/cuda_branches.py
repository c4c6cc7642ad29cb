"""Where the code asks which device it is on, or calls of a GPU, and the tests that go there on a CPU.

A row is `module:function question`, with the tests as pytest names them below `tests/`. `test_cuda_branches.py` finds
the places and compares. So `make test`, on a machine without a GPU, runs every line that only a GPU would reach; what a
GPU computes there is checked by `tests/gpu`.
"""

_VLLM = "actors/test_vllm_gpu.py"
_ARGUMENTS = "actors/test_vllm_arguments.py"
_WORKER = "actors/engines/test_vllm_worker.py"
_GPUS = "common/test_gpus.py"
_DOCTOR = "ops/cli/test_doctor.py"
_ATTENTION = "learner/engine/model/test_attention.py"
_MEMORY = "learner/engine/test_out_of_memory.py"
_PROCESS = "learner/engine/test_gpu_process.py"
_TENSORS = "learner/engine/test_gpu_tensors.py"
_HOST = "learner/engine/test_host_memory.py"

BRANCHES: dict[str, tuple[str, ...]] = {
    "actors.engines.vllm:import_vllm sees_gpu": (
        f"{_VLLM}::test_torch_and_vllm_are_built_for_the_same",
    ),
    "actors.engines.vllm:import_vllm on_cpu": (
        f"{_VLLM}::test_on_a_gpu_the_engine_is_spawned_and_samples_without_a_compiler",
        f"{_VLLM}::test_torch_and_vllm_are_built_for_the_same",
    ),
    "actors.engines.vllm:_start_engine on_cpu": (
        f"{_VLLM}::test_on_a_gpu_the_engine_is_spawned_and_samples_without_a_compiler",
        f"{_VLLM}::test_an_engine_names_its_gpu_and_is_told_the_size_of_its_cache_on_one_that_it_shares",
    ),
    "actors.engines.vllm:import_vllm current_platform.is_cpu": (
        f"{_VLLM}::test_torch_and_vllm_are_built_for_the_same",
    ),
    "actors.engines.vllm:import_vllm current_platform.device_type": (
        f"{_VLLM}::test_torch_and_vllm_are_built_for_the_same",
    ),
    "actors.engines.vllm:_start_engine current_platform.get_device_total_memory": (
        f"{_VLLM}::test_an_engine_names_its_gpu_and_is_told_the_size_of_its_cache_on_one_that_it_shares",
    ),
    "actors.engines.vllm:_start_engine current_platform.get_device_name": (
        f"{_VLLM}::test_an_engine_names_its_gpu_and_is_told_the_size_of_its_cache_on_one_that_it_shares",
    ),
    "actors.engines.vllm:sees_gpu has_gpu": (
        f"{_VLLM}::test_a_gpu_is_found_without_starting_cuda",
        f"{_GPUS}::test_neither_learner_nor_engine_takes_the_cpu_where_it_was_given_a_gpu",
    ),
    "actors.engines.vllm_arguments:engine_options on_cpu": (
        f"{_ARGUMENTS}::test_an_engine_takes_a_share_of_a_gpu_and_so_many_mebibytes_of_a_machine",
    ),
    "actors.engines.vllm_words:is_fast device.type": (
        f"{_WORKER}::test_on_a_cpu_a_worker_takes_no_words_and_tries_nothing",
        f"{_WORKER}::test_on_a_gpu_a_worker_takes_words_if_the_trial_was_right_and_loads_its_weights_if_not",
    ),
    "common.gpus:visible_gpus ask_nvidia_smi": (
        f"{_GPUS}::test_slices_count_instead_of_the_gpu_that_they_divide",
        f"{_GPUS}::test_the_environment_says_which_gpus_are_there",
    ),
    "common.gpus:ask_nvidia_smi nvidia-smi": (
        f"{_GPUS}::test_without_gpus_there_is_nothing_to_refuse",
    ),
    "common.gpus:has_gpu torch.cuda.is_available": (
        f"{_VLLM}::test_a_gpu_is_found_without_starting_cuda",
        f"{_GPUS}::test_without_gpus_there_is_nothing_to_refuse",
    ),
    "common.gpus:has_gpu visible_gpus": (
        f"{_GPUS}::test_gpus_that_torch_cannot_use_are_an_error_with_the_reason_and_the_cure",
        f"{_GPUS}::test_without_gpus_there_is_nothing_to_refuse",
    ),
    "common.gpus:has_gpu version.cuda": (
        f"{_GPUS}::test_gpus_that_torch_cannot_use_are_an_error_with_the_reason_and_the_cure",
    ),
    "common.gpus:_refusal torch.cuda.init": (
        f"{_GPUS}::test_gpus_that_torch_cannot_use_are_an_error_with_the_reason_and_the_cure",
    ),
    "learner.engine.model.attention:attend on_flash": (
        f"{_ATTENTION}::test_a_gpu_attends_as_a_cpu_does",
        f"{_ATTENTION}::test_a_default_step_on_a_gpus_path_is_the_cpus",
    ),
    "learner.engine.model.attention:attend device.type": (
        f"{_TENSORS}::test_tensors_that_no_kernel_takes_are_attended_to_by_segment",
        f"{_ATTENTION}::test_a_gpu_without_the_kernel_attends_segment_by_segment",
    ),
    "learner.engine.model.attention:on_flash is_cuda": (
        f"{_ATTENTION}::test_the_kernel_is_asked_for_what_it_does_alone",
    ),
    "learner.engine.model.attention:on_flash torch.cuda.get_device_capability": (
        f"{_ATTENTION}::test_the_kernel_is_asked_for_what_it_does_alone",
    ),
    "learner.engine.backends.deepspeed:_start_deepspeed torch.cuda.is_available": (
        f"{_PROCESS}::test_deepspeed_is_imported_for_the_device_and_its_ranks_join_over_the_devices_collectives",
    ),
    "learner.engine.backends.deepspeed:_start_deepspeed on_gpu": (
        f"{_PROCESS}::test_deepspeed_is_imported_for_the_device_and_its_ranks_join_over_the_devices_collectives",
    ),
    "learner.engine.model.head:_Sum.add_product device.type": (
        f"{_TENSORS}::test_a_gpu_adds_up_products_of_bfloat16_in_float32",
        "learner/engine/model/test_head.py::test_gradients_are_rounded_once_in_however_many_chunks_tokens_are_cut",
    ),
    "learner.engine.model.head:_add_product is_cuda": (
        f"{_TENSORS}::test_a_gpu_adds_up_products_of_bfloat16_in_float32",
        "learner/engine/model/test_head.py::test_gradients_are_rounded_once_in_however_many_chunks_tokens_are_cut",
    ),
    "learner.engine.model.head:_chunks device.type": (
        f"{_TENSORS}::test_the_head_cuts_a_gpus_tokens_by_a_gpus_limits_and_scores_the_same",
        "learner/engine/model/test_head.py::test_gradients_are_rounded_once_in_however_many_chunks_tokens_are_cut",
    ),
    "learner.engine.model.head:_rows device.type": (
        f"{_TENSORS}::test_the_head_cuts_a_gpus_tokens_by_a_gpus_limits_and_scores_the_same",
        "learner/engine/model/test_head.py::test_scores_and_gradient_equal_log_softmax",
    ),
    "learner.engine.host_memory:HostMemory.wait torch.accelerator.synchronize": (
        f"{_HOST}::test_every_version_is_copied_into_the_same_pages",
    ),
    "learner.engine.host_memory:_is_there device.type": (
        f"{_TENSORS}::test_a_gpus_weights_are_copied_into_pinned_memory",
        f"{_HOST}::test_a_model_on_a_cpu_is_not_copied",
    ),
    "learner.engine.host_memory:_pin pin_memory": (
        f"{_TENSORS}::test_a_gpus_weights_are_copied_into_pinned_memory",
    ),
    "learner.engine.model.lora:merged device.type": (
        f"{_TENSORS}::test_adapters_are_merged_where_the_weights_are",
        "learner/engine/model/test_lora.py::test_torch_and_numba_merge_to_the_same_bits",
    ),
    "learner.engine.model.lora:_merged_by_torch device.type": (
        f"{_TENSORS}::test_adapters_are_merged_where_the_weights_are",
        f"{_TENSORS}::test_adapters_are_merged_to_the_same_bits_in_blocks_of_any_size",
    ),
    "learner.engine.model.model:_moved device.type": (
        f"{_ATTENTION}::test_a_model_is_tried_on_the_device_and_left_in_the_memory_where_it_was",
    ),
    "learner.engine.model.model:_moved on_gpu": (
        f"{_ATTENTION}::test_a_model_is_tried_on_the_device_and_left_in_the_memory_where_it_was",
    ),
    "learner.engine.model.model:_moved torch.cuda.mem_get_info": (
        f"{_ATTENTION}::test_a_model_is_tried_on_the_device_and_left_in_the_memory_where_it_was",
        f"{_ATTENTION}::test_a_gpu_without_room_leaves_the_trial_to_the_cpu",
    ),
    "learner.engine.model.model:_moved torch.cuda.empty_cache": (
        f"{_ATTENTION}::test_a_model_is_tried_on_the_device_and_left_in_the_memory_where_it_was",
    ),
    "learner.engine.step:PolicyGradientEngine.logprob_gap_at torch.cuda.empty_cache": (
        f"{_MEMORY}::test_a_gap_that_has_no_room_is_not_measured",
    ),
    "learner.engine.step:PolicyGradientEngine._twice torch.cuda.empty_cache": (
        f"{_MEMORY}::test_a_step_that_is_computed_again_is_the_same_step",
    ),
    "learner.engine.step:_advice torch.cuda.max_memory_allocated": (
        f"{_MEMORY}::test_the_second_failure_ends_the_run_and_names_what_helps",
    ),
    "learner.engine.step:prepare_process has_gpu": (
        f"{_PROCESS}::test_each_rank_takes_its_gpu_and_its_share_of_the_cores",
        f"{_GPUS}::test_neither_learner_nor_engine_takes_the_cpu_where_it_was_given_a_gpu",
    ),
    "learner.engine.step:_take_gpu torch.cuda.device_count": (
        f"{_PROCESS}::test_each_rank_takes_its_gpu_and_its_share_of_the_cores",
        f"{_PROCESS}::test_more_ranks_than_gpus_are_an_error_of_the_configuration",
    ),
    "learner.engine.step:_take_gpu torch.cuda.set_device": (
        f"{_PROCESS}::test_each_rank_takes_its_gpu_and_its_share_of_the_cores",
    ),
    "learner.engine.step:build_scorer device.type": (
        f"{_ATTENTION}::test_layers_keep_their_products_on_a_cpu_alone",
    ),
    "learner.engine.transfer:to_device device.type": (
        f"{_TENSORS}::test_an_array_goes_to_a_gpu_from_pinned_memory_and_is_not_waited_for",
    ),
    "learner.engine.transfer:to_device pin_memory": (
        f"{_TENSORS}::test_an_array_goes_to_a_gpu_from_pinned_memory_and_is_not_waited_for",
    ),
    "learner.engine.recompute:give_back_freed device.type": (
        f"{_TENSORS}::test_freed_memory_is_given_back_where_activations_are_mallocs",
    ),
    "ops.cli.doctor:require_engines visible_gpus": (
        f"{_DOCTOR}::test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus",
    ),
    "ops.cli.doctor:_gpus visible_gpus": (
        f"{_DOCTOR}::test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus",
    ),
    "ops.cli.doctor:_gpus ask_nvidia_smi": (
        f"{_DOCTOR}::test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus",
    ),
    "ops.cli.doctor:_gpus torch.cuda.is_available": (
        f"{_DOCTOR}::test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus",
        f"{_DOCTOR}::test_doctor_names_the_gpus_that_torch_sees",
    ),
    "ops.cli.doctor:_gpus torch.cuda.device_count": (
        f"{_DOCTOR}::test_doctor_names_the_gpus_that_torch_sees",
    ),
    "ops.cli.doctor:_gpus torch.cuda.get_device_properties": (
        f"{_DOCTOR}::test_doctor_names_the_gpus_that_torch_sees",
    ),
    "ops.cli.doctor:_gpus version.cuda": (
        f"{_DOCTOR}::test_doctor_and_train_say_how_to_use_the_gpus_of_a_machine_set_up_for_cpus",
        f"{_DOCTOR}::test_doctor_names_the_gpus_that_torch_sees",
    ),
    "ops.launch.local:_supervise visible_gpus": (
        "ops/launch/test_local.py::test_train_says_how_it_divides_the_gpus_that_the_machine_has",
    ),
}
