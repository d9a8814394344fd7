-- Free a key by the operator's word, whatever is known of it: its next request is a new one.
--
-- Replies
--   forgotten    state: there is no record any more
--   absent       there is no record (repeated: there is none any more)
--   outstanding  ms left of the lease: somebody may be sending right now
--   unreadable   what cannot be read may be outstanding in a sidecar of another version
--
-- Transitions: completed, unknown, and outstanding with its lease over -> absent. Nothing here needs memory.

local record = read()

if not record then return {'absent'} end
if not record.state and redis.pcall('HGET', KEYS[1], 'state') == 'outstanding' then return {'unreadable'} end
if record.state == 'outstanding' then
  local since = since_change(record)
  if since <= record.lease then return {'outstanding', record.lease - since} end
end

redis.call('DEL', KEYS[1])
unlist()
return {'forgotten', record.state or 'unreadable'}
