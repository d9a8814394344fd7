-- Free the key: this attempt surely sent nothing, or its answer frees the key.
--
-- Replies
--   released   there is no record (repeated: there was none)
--   unknown    an earlier attempt may have sent a mail: the record is unknown again
--   stale      not the owner: nothing was changed
--
-- Transitions: outstanding, by the owner -> absent; unknown where an earlier attempt is. Nothing here needs memory.

local record = read()

if not record then return {'released'} end
if not record.state or record.owner ~= ARGV[1] then return {'stale'} end
if record.state == 'completed' then return {'stale'} end
if record.state == 'unknown' then return {'unknown'} end

if record.earlier then
  local written = redis.pcall('HSET', KEYS[1], 'state', 'unknown', 'why', record.why or 'owner-lost')
  if type(written) == 'table' and written.err then
    -- A full store takes no HSET, but an expiry: one that says the lease is over means the same to every reader.
    redis.call('PEXPIRE', KEYS[1], math.max(1, record.hold - record.lease - 1))
  else
    redis.call('PEXPIRE', KEYS[1], record.hold)
  end
  return {'unknown'}
end

redis.call('DEL', KEYS[1])
unlist()
return {'released'}
