-- Say that the exchange of this reservation still runs. One PEXPIRE, which a full store still takes.
--
-- Replies
--   renewed    the lease is counted from now
--   restored   the store had lost the record (or the operator had freed it): it stands again, same token
--   stale      another attempt owns it, or it is settled: nothing was changed
--
-- Transitions: outstanding (lease over or not) -> outstanding; absent -> outstanding.

local record = read()

if not record then
  put('outstanding', ARGV[12], ARGV[13])
  list(2, tonumber(ARGV[5]))
  return {'restored'}
end

if record.state == 'outstanding' and record.owner == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], record.hold)
  return {'renewed'}
end

return {'stale'}
