"""Column names of the tables between stages, spelt once.

Axes: ``N`` rows, ``W`` stochastic steps, ``L`` rows of an embedding, ``D`` its width, ``X`` any latent axes.
"""

# identity of a sample, in every per-sample table
SAMPLE_INDEX = "sample_index"
SAMPLE_ID = "sample_id"
UID = "uid"
SESSION = "session"
IDENTITY = (SAMPLE_INDEX, SAMPLE_ID, UID, SESSION)

# prompts and requests
PROMPT_KEY = "prompt_key"
DATASET = "dataset"
DATASET_ROW = "dataset_row"
EPOCH = "epoch"
PROMPT = "prompt"
NEGATIVE_PROMPT = "negative_prompt"
MESSAGES_JSON = "messages_json"
NEGATIVE_MESSAGES_JSON = "negative_messages_json"
DATA_SOURCE = "data_source"
GROUND_TRUTH = "ground_truth"
REWARD_MODEL_JSON = "reward_model_json"
EXTRA_INFO_JSON = "extra_info_json"
AGENT_NAME = "agent_name"
SEED = "seed"
SAMPLING_JSON = "sampling_json"
VALIDATE = "validate"
WANTED_VERSION = "wanted_version"
PRIORITY = "priority"

# trajectories
STATUS = "status"
ERROR_CLASS = "error_class"
ERROR_MESSAGE = "error_message"
ATTEMPTS = "attempts"
STOP_REASON = "stop_reason"
REPLICA = "replica"
MIN_VERSION = "min_version"
MAX_VERSION = "max_version"
NUM_TURNS = "num_turns"
NUM_PREEMPTED = "num_preempted"
GENERATE_S = "t_generate_s"
TOOL_S = "t_tool_s"
SCORE_S = "t_score_s"
WINDOW_START = "sde_window_start"
ALL_LATENTS = "all_latents"
ALL_TIMESTEPS = "all_timesteps"
STEP_INDICES = "step_indices"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
LATENTS_CLEAN = "latents_clean"

# embeddings and conditions
ENCODER_DIGEST = "encoder_digest"
PROMPT_EMBEDS = "prompt_embeds"
NEGATIVE_PROMPT_EMBEDS = "negative_prompt_embeds"
POOLED_PROMPT_EMBEDS = "pooled_prompt_embeds"
NEGATIVE_POOLED_PROMPT_EMBEDS = "negative_pooled_prompt_embeds"
AUDIO_PROMPT_EMBEDS = "audio_prompt_embeds"
NEGATIVE_AUDIO_PROMPT_EMBEDS = "negative_audio_prompt_embeds"
CONDITION_VIDEO_ROWS = "condition_video_rows"
CONDITION_AUDIO_ROWS = "condition_audio_rows"

# media
KIND = "kind"
PIXELS = "pixels"
PIXELS_ANY = "pixels_any"
SHA256 = "sha256"

# rewards
REWARD_NAME = "reward_name"
WEIGHT = "weight"
REQUIRED = "required"
SCORE = "score"
ERROR = "error"
LATENCY_S = "latency_s"
SCORER_VERSION = "scorer_version"
EXTRA_JSON = "extra_json"
RM_SCORE = "rm_score"
VALID = "valid"

# what the trainer adds
WEIGHTS_VERSION = "weights_version"
OLD_LOG_PROBS = "old_log_probs"
REF_LOG_PROB = "ref_log_prob"
REF_PREV_SAMPLE_MEAN = "ref_prev_sample_mean"
REF_NOISE_PRED = "ref_noise_pred"
ADVANTAGE = "advantage"
GROUP_MEAN = "group_mean"
GROUP_STD = "group_std"
BATCH_STD = "batch_std"
ESTIMATOR = "estimator"
IS_PADDING = "is_padding"
