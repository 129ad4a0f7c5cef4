"""The engine: prompts to token ids, the step loop and its thread, tokens to text, one stream a request.

Owns: ids and ends of live requests (`live_requests`), health, the drain, and the thread that alone touches
scheduler, KV cache and model. `rpc`, `llm` and `startup` may call it, through `api.EngineClient`; it knows
no wire and no configuration file. Invariant: every request that `submit` accepted ends exactly once on its
stream, whatever fails.
"""
