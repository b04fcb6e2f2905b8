//! Which session a request belongs to: what the client says, else the longest known prefix of its prompt.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use axum::http::HeaderMap;
use pinion_schemas::limits::{NAME_BYTES_MAX, SESSION_ID_BYTES_MAX};
use pinion_schemas::{ChainHasher, Class, IdError, PageHash, SessionId};

use crate::error::ApiError;

/// Headers that name a session, the first one present wins: ours, Claude Code's, Codex's two, `OpenCode`'s.
pub const SESSION_HEADERS: [&str; 5] = [
    "x-session-id",
    "x-claude-code-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
];
/// Header with the service class.
pub const CLASS_HEADER: &str = "x-pinion-class";
/// Header with the tenant.
pub const TENANT_HEADER: &str = "x-pinion-tenant";
/// Ends of earlier turns remembered. At the cap the least recently used is forgotten: its session begins anew.
pub const TIPS_MAX: usize = 65_536;

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    let text = value
        .to_str()
        .map_err(|_| ApiError::field(name, "invalid_header", "not readable: use visible ASCII characters"))?;
    Ok(Some(text.trim()).filter(|text| !text.is_empty()))
}

/// The class a request asks for; interactive if it asks for none.
///
/// # Errors
/// 400 for a word that is no class.
pub fn class(headers: &HeaderMap) -> Result<Class, ApiError> {
    let Some(word) = header(headers, CLASS_HEADER)? else {
        return Ok(Class::Interactive);
    };
    Class::ALL.iter().copied().find(|c| c.label() == word).ok_or_else(|| {
        let known: Vec<_> = Class::ALL.iter().map(|c| c.label()).collect();
        ApiError::field(
            CLASS_HEADER,
            "invalid_class",
            format!("{word:?} is no class: use one of {known:?}"),
        )
    })
}

/// The tenant a request names.
///
/// # Errors
/// 400 if it is too long.
pub fn tenant(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(tenant) = header(headers, TENANT_HEADER)? else {
        return Ok(None);
    };
    if tenant.len() > NAME_BYTES_MAX {
        let message = format!("{} bytes: use at most {NAME_BYTES_MAX}", tenant.len());
        return Err(ApiError::field(TENANT_HEADER, "invalid_tenant", message));
    }
    Ok(Some(tenant.to_owned()))
}

/// The session a request names by header, `prompt_cache_key` or `metadata.user_id`, in this order.
///
/// # Errors
/// 400 for an id longer than a session id may be, naming where it was found.
pub fn named(
    headers: &HeaderMap,
    cache_key: Option<&str>,
    user_id: Option<&str>,
) -> Result<Option<SessionId>, ApiError> {
    let check = |place: &str, id: &str| {
        let checked = match id.len() {
            got if got > SESSION_ID_BYTES_MAX => Err(IdError::TooLong {
                what: "session id",
                got,
                max: SESSION_ID_BYTES_MAX,
            }),
            _ => SessionId::new(id),
        };
        checked.map_err(|error| ApiError::field(place, "invalid_session_id", error))
    };
    for name in SESSION_HEADERS {
        if let Some(id) = header(headers, name)? {
            return check(name, id).map(Some);
        }
    }
    for (place, id) in [("prompt_cache_key", cache_key), ("metadata.user_id", user_id)] {
        if let Some(id) = id.filter(|id| !id.is_empty()) {
            return check(place, id).map(Some);
        }
    }
    Ok(None)
}

/// The session as the cluster knows it: `tenant/id` for a tenant, so that ids of two tenants do not meet.
///
/// # Errors
/// 400 if the two together are longer than a session id may be.
pub fn of_tenant(tenant: Option<&str>, session: SessionId) -> Result<SessionId, ApiError> {
    let Some(tenant) = tenant else { return Ok(session) };
    SessionId::new(format!("{tenant}/{session}")).map_err(|error| {
        ApiError::field(
            TENANT_HEADER,
            "invalid_session_id",
            format!("with the tenant's name, {error}"),
        )
    })
}

/// The id as the client knows it.
pub fn for_client<'a>(tenant: Option<&str>, session: &'a SessionId) -> &'a str {
    let own = tenant.and_then(|tenant| session.as_str().strip_prefix(tenant)?.strip_prefix('/'));
    own.unwrap_or(session.as_str())
}

/// Ends of earlier turns, by the name of their last full page. For clients that name no session.
pub struct Tips {
    page_tokens: u32,
    cap: usize,
    inner: Mutex<Inner>,
}

/// The map and its order of use: `uses` numbers every touch, the smallest is the oldest.
#[derive(Default)]
struct Inner {
    tips: HashMap<PageHash, (SessionId, u64)>,
    order: BTreeMap<u64, PageHash>,
    uses: u64,
}

impl Inner {
    fn touch(&mut self, tip: PageHash, session: SessionId) {
        self.uses += 1;
        if let Some((_, before)) = self.tips.insert(tip, (session, self.uses)) {
            self.order.remove(&before);
        }
        self.order.insert(self.uses, tip);
    }
}

impl Tips {
    /// Remembers nothing yet, at most `cap` ends.
    pub fn new(page_tokens: u32, cap: usize) -> Self {
        Self {
            page_tokens,
            cap,
            inner: Mutex::default(),
        }
    }

    fn pages(&self, tenant: Option<&str>, tokens: &[u32]) -> Vec<PageHash> {
        ChainHasher::new(self.page_tokens, &[tenant]).push(tokens)
    }

    /// The session whose earlier turn is the longest prefix of `prompt`, in whole pages and in this tenant.
    pub fn find(&self, tenant: Option<&str>, prompt: &[u32]) -> Option<SessionId> {
        let pages = self.pages(tenant, prompt);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let tip = pages.into_iter().rev().find(|page| inner.tips.contains_key(page))?;
        let session = inner.tips.get(&tip).map(|(session, _)| session.clone())?;
        inner.touch(tip, session.clone());
        Some(session)
    }

    /// A turn of `session` ended with this context. Contexts shorter than a page leave no trace.
    pub fn learn(&self, tenant: Option<&str>, context: &[u32], session: &SessionId) {
        let Some(tip) = self.pages(tenant, context).pop() else {
            return;
        };
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.touch(tip, session.clone());
        while inner.tips.len() > self.cap {
            let Some((_, oldest)) = inner.order.pop_first() else {
                return;
            };
            inner.tips.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_names_is_fixed() {
        let mut headers = HeaderMap::new();
        let named = |h: &HeaderMap| {
            named(h, Some("key"), Some("user"))
                .unwrap()
                .unwrap()
                .as_str()
                .to_owned()
        };
        assert_eq!(named(&headers), "key");
        for name in SESSION_HEADERS.iter().rev() {
            headers.insert(*name, name.parse().unwrap());
            assert_eq!(named(&headers), *name);
        }
        assert_eq!(
            super::named(&HeaderMap::new(), None, Some("user"))
                .unwrap()
                .unwrap()
                .as_str(),
            "user"
        );
        assert_eq!(super::named(&HeaderMap::new(), None, None).unwrap(), None);
    }

    #[test]
    fn the_longest_known_prefix_wins_inside_a_tenant() {
        let tips = Tips::new(4, 8);
        let (a, b) = (SessionId::new("a").unwrap(), SessionId::new("b").unwrap());
        let long: Vec<u32> = (0..20).collect();
        tips.learn(None, &long[..5], &a);
        tips.learn(None, &long[..13], &b);
        assert_eq!(tips.find(None, &long[..3]), None);
        assert_eq!(tips.find(None, &long[..9]), Some(a));
        assert_eq!(tips.find(None, &long), Some(b));
        assert_eq!(tips.find(Some("t"), &long), None);
    }

    #[test]
    fn at_the_cap_the_least_recently_used_is_forgotten() {
        let tips = Tips::new(1, 2);
        let s = SessionId::new("s").unwrap();
        for token in [1, 2] {
            tips.learn(None, &[token], &s);
        }
        assert!(tips.find(None, &[1]).is_some());
        tips.learn(None, &[3], &s);
        assert!(tips.find(None, &[2]).is_none());
        assert!(tips.find(None, &[1]).is_some() && tips.find(None, &[3]).is_some());
        let inner = tips.inner.lock().unwrap();
        assert_eq!((inner.tips.len(), inner.order.len()), (2, 2));
    }
}
