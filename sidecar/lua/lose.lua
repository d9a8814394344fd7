-- Record that bytes left and no complete answer came: a mail may have left, nobody knows.
--
-- ARGV 16 ttl, ms   17 ms since this attempt was reserved   18 seen: the status where at least a head was read, or ''
--
-- Replies
--   unknown   the record says so (repeated: it already did)
--   stale     not the owner: the record now knows that an earlier attempt is unknown, nothing else was changed
--
-- Transitions: outstanding, by the owner -> unknown; outstanding or unknown, by a former owner -> the same, earlier
-- attempt unknown; absent, by an owner younger than ttl -> unknown.

local record = read()

if not record then
  if tonumber(ARGV[17]) >= tonumber(ARGV[16]) then return {'stale'} end
  put('unknown', ARGV[12], ARGV[13])
  make_unknown({hold = tonumber(ARGV[5])}, 'answer-lost', ARGV[18])
  return {'unknown'}
end

if not record.state or record.state == 'completed' then return {'stale'} end

if record.owner ~= ARGV[1] then
  -- No expiry here: who is not the owner never prolongs.
  if not record.earlier then redis.call('HSET', KEYS[1], 'earlier', 1) end
  return {'stale'}
end

if record.state == 'outstanding' then make_unknown(record, 'answer-lost', ARGV[18]) end
return {'unknown'}
