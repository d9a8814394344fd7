-- Settle an unknown outcome by the operator's word.
--
-- ARGV 16 the word: sent or not-sent   17 ttl, ms   18 how long after the last attempt's end "not sent" may be said, ms
--      19 forced: 1 or 0
--      20 status   21 reason   22 fields   23 content kept: 1, or 2 where no answer is known   24 content, or the
--      provider's id of the mail where no answer is known   25 the provider's id of the mail, or ''
--
-- Replies
--   completed    retries get the answer, or are told that there is none (repeated: they do already)
--   released     the key is free (not sent)
--   absent       there is no record (repeated after "not sent": there is none any more)
--   again        the operator has said "sent" before: nothing was changed
--   settled      the provider's own answer stands in the record: nothing was changed
--   outstanding  ms left of the lease: somebody may be sending right now
--   early        ms until "not sent" may be said: the provider's log may lag
--   unreadable   what cannot be read may be outstanding in a sidecar of another version: only forced
--
-- Transitions: unknown, and outstanding with its lease over -> completed (sent), absent (not sent). The owner changes,
-- so that an attempt which ends later is told that it is not the owner any more.

local record = read()
local sent, forced = ARGV[16] == 'sent', ARGV[19] == '1'

local function complete()
  redis.call('HSET', KEYS[1], 'state', 'completed', 'owner', ARGV[1], 'status', ARGV[20], 'reason', ARGV[21],
             'fields', ARGV[22], 'kept', ARGV[23], 'content', ARGV[24], 'ae', '', 'resolved', 1, 'pid', ARGV[25])
  redis.call('HDEL', KEYS[1], 'why', 'seen')
  redis.call('PEXPIRE', KEYS[1], ARGV[17])
  list(3, tonumber(ARGV[17]))
  return {'completed'}
end

local function free()
  redis.call('DEL', KEYS[1])
  unlist()
  return {'released'}
end

if not record then return {'absent'} end

if not record.state then
  if redis.pcall('HGET', KEYS[1], 'state') == 'outstanding' and not forced then return {'unreadable'} end
  if not sent then
    if not forced then return {'unreadable'} end
    return free()
  end
  -- A full store refuses this first write, before what stands there is gone.
  list(3, tonumber(ARGV[17]))
  redis.call('DEL', KEYS[1])
  put('completed', server_ms() or 0, 0)
  return complete()
end

if record.state == 'completed' then
  if record.owner == ARGV[1] then return {'completed'} end
  if sent and redis.call('HGET', KEYS[1], 'resolved') then return {'again'} end
  return {'settled'}
end

local over = since_change(record)
if record.state == 'outstanding' then
  if over <= record.lease then return {'outstanding', record.lease - over} end
  over = over - record.lease
end

if sent then return complete() end
local quiet = tonumber(ARGV[18])
if over < quiet and not forced then return {'early', quiet - over} end
return free()
