-- Reserve a record for one attempt, or say why not. Repeated with the same token it finds its own reservation.
--
-- ARGV 16 policy: hold or resend   17 the provider's window, ms, -1 where it has no key of its own
--      18 margin of the window, ms   19 resend_after, ms   20 the longest an attempt may last, ms
--
-- Replies
--   reserved  attempt, earlier (1 or 0), native key, first ms, spent ms, ms left of the window (-1: no window)
--   outstanding  ms left of the lease
--   later  ms until a resend may go out
--   held  why (owner-lost or answer-lost), seen status or ''
--   completed  owner, status, reason, fields, content or '', kept (1 or 0), Accept-Encoding
--   reused  state, status or '', earlier (1 or 0)
--   unreadable
--
-- Transitions: absent -> outstanding; unknown, and outstanding with its lease over -> outstanding (resend alone).
-- A stale caller gets what any other arrival gets. Nothing else is written: a full store can still refuse and replay.

local record = read()

if not record then
  local first = server_ms() or 0
  put('outstanding', first, 0)
  list(2, tonumber(ARGV[5]))
  return {'reserved', 1, 0, ARGV[6], first, 0, tonumber(ARGV[17])}
end

if not record.state then
  if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
  return {'unreadable'}
end

-- The fingerprint goes before anything else about the record. One without a fingerprint fits every request.
if record.alg ~= 'off' and ARGV[3] ~= 'off' then
  if record.alg ~= ARGV[3] then return {'unreadable'} end
  if record.fp ~= ARGV[2] then
    return {'reused', record.state, record.status or '', record.earlier and 1 or 0}
  end
end

if record.state == 'completed' then
  local kept = redis.call('HMGET', KEYS[1], 'status', 'reason', 'fields', 'content', 'kept', 'ae')
  return {'completed', record.owner, kept[1], kept[2], kept[3], kept[4] or '', tonumber(kept[5]), kept[6] or ''}
end

local function window_left()
  local window = tonumber(ARGV[17])
  if window < 0 then return -1 end
  local now = server_ms()
  local passed
  if now and record.first > 0 then
    passed = now - record.first
  else
    passed = record.spent + tonumber(ARGV[20]) + since_change(record)
  end
  return math.max(0, window - tonumber(ARGV[18]) - passed)
end

if record.owner == ARGV[1] and record.state == 'outstanding' then
  redis.call('PEXPIRE', KEYS[1], record.hold)
  return {'reserved', record.attempt, record.earlier and 1 or 0, record.native, record.first, record.spent,
          window_left()}
end

local since = since_change(record)
local why, over = record.why or 'owner-lost', since
if record.state == 'outstanding' then
  if since <= record.lease then return {'outstanding', record.lease - since} end
  why, over = 'owner-lost', since - record.lease
end

local left = window_left()
-- A further attempt under another credential would be another mail to the provider (amendment to section 4).
if ARGV[16] ~= 'resend' or left == 0 or record.cred ~= ARGV[7] then return {'held', why, record.seen or ''} end
if over < tonumber(ARGV[19]) then return {'later', tonumber(ARGV[19]) - over} end

local attempt, spent = record.attempt + 1, record.spent + tonumber(ARGV[20]) + since
redis.call('HSET', KEYS[1], 'state', 'outstanding', 'owner', ARGV[1], 'attempt', attempt, 'earlier', 1, 'why', why,
           'lease', ARGV[4], 'hold', ARGV[5], 'spent', spent, 'ae', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
list(2, tonumber(ARGV[5]))
return {'reserved', attempt, 1, record.native, record.first, spent, left}
