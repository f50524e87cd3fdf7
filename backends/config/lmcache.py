"""Names that LMCache reads or used to read, so that a file or environment made for LMCache loads as it is.

Each name gives one line of warning when it is met, in place of the guess that it might be a typing error. They are
those of LMCache 0.5.6 in its own spelling, with the ones that it has given up but that people's files still hold; a key
that gains a meaning here moves to schema.py, an entry of extra_config to rules.py.
"""

from collections.abc import Mapping
from typing import Final

_KEYS: Final = """
app_id audit_actual_remote_url blend_check_layers blend_min_tokens blend_recompute_ratios blend_special_str
blend_thresholds chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_start_statistics chunk_statistics_strategy controller_pull_url controller_reply_url ec
enable_async_loading enable_blending enable_chunk_statistics enable_controller enable_hidden_state_cache
enable_kv_events enable_lazy_memory_allocator enable_p2p enable_pd enable_scheduler_bypass_lookup
external_lookup_client gds_backend gds_buffer_size gds_path gds_path_sharding hidden_state_layers
hidden_states_retrieve_mode hit_miss_ratio internal_api_server_enabled internal_api_server_host
internal_api_server_include_index_list internal_api_server_port_start internal_api_server_socket_path_prefix
lazy_memory_expand_trigger_ratio lazy_memory_initial_ratio lazy_memory_safe_size lazy_memory_step_ratio
lmcache_instance_id lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time lmcache_worker_ids
lmcache_worker_ports local_disk_path_sharding lookup_server_worker_ids lookup_timeout_ms maru_path maru_pool_size
max_hidden_state_cpu_size mp_host mp_port nixl_backends nixl_buffer_device nixl_buffer_size numa_mode p2p_host
p2p_init_ports p2p_lookup_ports pd_allocation_timeout_sec pd_backend_mode pd_bidirectional pd_buffer_device
pd_buffer_size pd_condition_poll_interval_sec pd_max_prefill_len pd_peer_alloc_port pd_peer_host pd_peer_init_port
pd_peer_query_port pd_proxy_host pd_proxy_port pd_role pd_shutdown_timeout_sec pd_skip_proxy_notification
pin_check_interval_sec pin_timeout_sec priority_limit py_enable_gc remote_config_url remote_storage_plugins
reserve_local_cpu_size retrieve_locations run_script_api_enabled runtime_plugin_locations script_allowed_imports
shm_name storage_plugins store_location transfer_channel use_gds use_gpu_connector_v3
"""

# Read straight from the environment, outside of LMCache's configuration.
_VARIABLES: Final = """
LMCACHE_AEROSPIKE_HOSTS LMCACHE_AEROSPIKE_NAMESPACE LMCACHE_AEROSPIKE_PASSWORD LMCACHE_AEROSPIKE_SET
LMCACHE_AEROSPIKE_USERNAME LMCACHE_CONTROLLER_CONFIG_FILE LMCACHE_COORDINATOR_ADVERTISE_IP
LMCACHE_COORDINATOR_EVENT_FLUSH_INTERVAL LMCACHE_COORDINATOR_EVENT_REPORTING LMCACHE_COORDINATOR_HEARTBEAT_INTERVAL
LMCACHE_COORDINATOR_URL LMCACHE_DEVICE_BACKEND LMCACHE_DISABLE_BANNER LMCACHE_FORCE_SKIP_SAVE
LMCACHE_GPU_STAGING_BUFFER_BYTES LMCACHE_LOG_LEVEL LMCACHE_MP_TRANSFER_MODE LMCACHE_MQ_TIMEOUT
LMCACHE_MUSA_HANDLE_TRANSFER LMCACHE_MUSA_NATIVE_KV_TRANSFER LMCACHE_OFFLOAD_RPC_PORT
LMCACHE_REQUEST_TELEMETRY_ENDPOINT LMCACHE_REQUEST_TELEMETRY_TYPE LMCACHE_RESP_HOST LMCACHE_RESP_PORT
LMCACHE_ROCM_ENABLE_BATCH_MEMCPY LMCACHE_RUNTIME_PLUGIN_CONFIG LMCACHE_RUNTIME_PLUGIN_EXTRA_CONFIG
LMCACHE_SERVER_URL LMCACHE_TRACK_USAGE LMCACHE_USAGE_TRACK_INTERVAL LMCACHE_USAGE_TRACK_URL
"""

FOREIGN_KEYS: Final = frozenset(_KEYS.split())
FOREIGN_ENV: Final = frozenset(_VARIABLES.split())
EC_PREFIX: Final = "ec_"
"""How LMCache's second set of keys begins, which is for its cache of encoder outputs."""

FORMER_NAMES: Final[Mapping[str, str]] = {
    "blend_recompute_ratio": "blend_recompute_ratios",
    "controller_url": "controller_pull_url",
    "cufile_buffer_size": "gds_buffer_size",
    "enable_xpyd": "enable_pd",
    "external_backends": "storage_plugins",
    "lmcache_worker_port": "lmcache_worker_ports",
    "max_local_cache_size": "max_local_cpu_size",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_port": "nixl_receiver_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "peer_init_ports": "p2p_init_ports",
    "peer_lookup_ports": "p2p_lookup_ports",
    "plugin_locations": "runtime_plugin_locations",
    "weka_path": "gds_path",
}
"""Old name -> what it became. nixl_buffer_size is missing: LMCache has it as a key of its own again."""

_GIVEN_UP: Final = """
blend_add_special_in_precomp blend_separator distributed_url enable_nixl error_handling local_device lookup_url
nixl_enable_gc nixl_receiver_host nixl_receiver_port pipelined_backend use_experimental
"""
BEFORE_V1: Final = frozenset(_GIVEN_UP.split())
"""Settings that LMCache has given up without a successor."""
BEFORE_V1_PREFIX: Final = "LM_CACHE_"
"""How its variables began then."""

_ENTRIES: Final = """
access_log allocation_attempt_delay_secs audit_actual_remote_url audit_backend_enabled audit_calc_checksum
audit_exclude_cmds audit_verify_checksum aws_access_key_id aws_secret_access_key azure_account_key azure_account_url
azure_connection_string azure_sas_token chunk_statistics_async_preprocess_chunks chunk_statistics_async_queue_capacity
chunk_statistics_file_max_count chunk_statistics_file_output_dir chunk_statistics_file_rotation_size
chunk_statistics_mem_bf_expected_chunks chunk_statistics_mem_bf_false_positive_rate disable_tls
enable_cache_usage_details_in_response enable_nixl_storage enable_sparse fallback_policy first_rank_max_local_cpu_size
force_store_wait fs_base_path fs_connector_read_ahead_size fs_connector_relative_tmp_dir fs_connector_use_odirect
full_sync_batch_interval_ms full_sync_batch_size full_sync_max_poll_attempts full_sync_max_retry_count
full_sync_retry_delay_s full_sync_startup_delay_s full_sync_status_poll_interval_s
get_blocking_failed_threshold gpu_to_numa_mapping heartbeat_url hf3fs_base_path hf3fs_mount_point infinistore_link_type
internal_api_server_access_log internal_api_server_log_level kv_msg_batch_size kv_msg_batch_timeout lmcache_rpc_port
local_cpu.pinned_align_bytes lookup_backoff_time maru_eager_map maru_instance_id maru_max_inflight maru_timeout_ms
maru_use_async_rpc max_alloc_attempts mooncake_prefer_local_alloc nixl_async_put nixl_backend nixl_backend_params
nixl_enable_prog_thread nixl_endpoint_list nixl_path nixl_path_sharding nixl_pool_size nixl_presence_cache
nixl_presence_cache_only nixl_sync_mode nixl_use_hugepages p2p_max_retry_count p2p_socket_recv_timeout_ms
p2p_socket_send_timeout_ms ping_interval ping_timeout remote_enable_mla_worker_id_as0 s3_enable_s3express
s3_num_io_threads s3_prefer_http2 s3_region sagemaker_hyperpod_bucket sagemaker_hyperpod_max_lease_size_mb
sagemaker_hyperpod_shared_memory_name sagemaker_hyperpod_use_https save_chunk_meta save_only_first_rank shm_name
storage_root_dir transfer_timeout use_direct_io use_exists_sync valkey_enable_ttl valkey_ttl_sec
waiting_time_for_recovery worker_socket_recv_timeout_ms worker_socket_send_timeout_ms
"""
FOREIGN_ENTRIES: Final = frozenset(_ENTRIES.split())
"""What LMCache looks up in extra_config."""
FOREIGN_ENTRY_PREFIXES: Final = (
    "dax.",
    "histogram_bucket_",
    "lmcache.",
    "remote_storage_plugin.",
    "rust_raw_block.",
    "storage_plugin.",
)
"""How entries begin whose names people make up, after a plugin of theirs for one."""
