//! Requests and answers as the proxy passes them on. Defines what a client may send, and what a
//! server receives.
//!
//! hyper reads a message and writes a new one, so no byte of the client's framing reaches the
//! server. This module checks the meaning: the host of a request, and fields that concern only one
//! connection.

use std::net::IpAddr;
use std::str::FromStr;

use hyper::body::Bytes;
use hyper::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery};
use hyper::{Method, StatusCode, Uri, Version};

/// The maximum size of the head of a request or an answer.
pub(crate) const MAX_HEAD: usize = 64 << 10;

/// A refusal: the proxy answers the client itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal(pub(crate) StatusCode, pub(crate) &'static str);

pub(crate) const MALFORMED_BODY: Refusal =
    Refusal(StatusCode::BAD_REQUEST, "the body is malformed");
pub(crate) const SLOW_BODY: Refusal =
    Refusal(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
pub(crate) const LARGE_BODY: Refusal =
    Refusal(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 1 MiB");
pub(crate) const NO_SERVER: Refusal =
    Refusal(StatusCode::BAD_GATEWAY, "no server answered this request");
pub(crate) const TOO_LATE: Refusal =
    Refusal(StatusCode::GATEWAY_TIMEOUT, "no server answered in time");
const NO_TUNNELS: Refusal =
    Refusal(StatusCode::NOT_IMPLEMENTED, "CONNECT and Upgrade are not supported");
const OTHER_CODING: Refusal =
    Refusal(StatusCode::NOT_IMPLEMENTED, "the only transfer coding is chunked");
const NO_HOST: Refusal = Refusal(StatusCode::BAD_REQUEST, "there must be one valid Host field");
const NO_PATH: Refusal = Refusal(StatusCode::BAD_REQUEST, "the request target is not a path");

/// A request that can be sent to either server, more than once.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: Method,
    pub(crate) target: Uri,
    pub(crate) fields: HeaderMap,
    pub(crate) body: Bytes,
}

/// The origin of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    pub(crate) client: IpAddr,
    /// Whether clients are trusted proxies, whose `Forwarded` is passed on.
    pub(crate) trusted: bool,
}

impl Request {
    /// Checks a head and rewrites it for servers. The body is added later.
    pub(crate) fn check(head: Parts, origin: Origin) -> Result<Self, Refusal> {
        let Parts { method, uri, version, headers: mut fields, .. } = head;
        if method == Method::CONNECT || fields.contains_key(UPGRADE) {
            return Err(NO_TUNNELS);
        }
        if fields.contains_key(TRANSFER_ENCODING) && !is_chunked_only(&fields) {
            return Err(OTHER_CODING);
        }
        let host = host(&uri, version, &fields)?;
        let target = target(&method, &uri)?;
        let has_length = fields.contains_key(CONTENT_LENGTH);
        let has_body = has_length || fields.contains_key(TRANSFER_ENCODING);
        remove_hop_by_hop(&mut fields);
        fields.remove(EXPECT);
        fields.remove(CONTENT_LENGTH);
        if has_body {
            // A placeholder until the body has arrived.
            fields.insert(CONTENT_LENGTH, HeaderValue::from(0));
        }
        if !origin.trusted {
            remove_forwarded(&mut fields);
        }
        fields.append(FORWARDED, forwarded(origin.client, host.as_ref()));
        fields.remove(HOST);
        if let Some(host) = host {
            let host = HeaderValue::from_str(host.as_str()).map_err(|_| NO_HOST)?;
            fields.insert(HOST, host);
        }
        Ok(Self { method, target, fields, body: Bytes::new() })
    }

    pub(crate) fn set_body(&mut self, body: Bytes) {
        if let Some(length) = self.fields.get_mut(CONTENT_LENGTH) {
            *length = HeaderValue::from(body.len());
        }
        self.body = body;
    }
}

/// Whether `chunked` is the only transfer coding.
pub(crate) fn is_chunked_only(fields: &HeaderMap) -> bool {
    let mut codings = fields.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next().map(HeaderValue::as_bytes);
    let is_chunked = first.is_some_and(|coding| coding.eq_ignore_ascii_case(b"chunked"));
    is_chunked && codings.next().is_none()
}

/// The host of a request. For a target in absolute form, the target decides (RFC 9112, section
/// 3.2.2). `None` for an HTTP/1.0 request without a host.
fn host(target: &Uri, version: Version, fields: &HeaderMap) -> Result<Option<Authority>, Refusal> {
    let mut hosts = fields.get_all(HOST).iter();
    let first = hosts.next();
    let second = hosts.next();
    if second.is_some() {
        return Err(NO_HOST);
    }
    let host = match (target.authority(), first) {
        (Some(authority), _) => Some(authority.clone()),
        (None, Some(value)) => {
            let text = value.to_str().map_err(|_| NO_HOST)?;
            Some(Authority::from_str(text).map_err(|_| NO_HOST)?)
        }
        (None, None) if version == Version::HTTP_10 => None,
        (None, None) => return Err(NO_HOST),
    };
    let has_user = host.as_ref().is_some_and(|host| host.as_str().contains('@'));
    if has_user { Err(NO_HOST) } else { Ok(host) }
}

/// The target in origin form, or `*` for OPTIONS.
fn target(method: &Method, uri: &Uri) -> Result<Uri, Refusal> {
    let is_http = uri.scheme_str().is_none_or(|scheme| matches!(scheme, "http" | "https"));
    let path = uri.path_and_query().filter(|_| is_http).ok_or(NO_PATH)?;
    let path = path.as_str();
    let is_asterisk = path == "*" && method == Method::OPTIONS;
    let path = if path.starts_with('/') || is_asterisk {
        // Parsed again because hyper reads the path of `http://host#fragment` as `/`, but writes it
        // as an empty string.
        PathAndQuery::from_str(path)
    } else if path.starts_with('?') {
        // `http://host?query` has an empty path, which is `/`.
        PathAndQuery::from_str(&format!("/{path}"))
    } else {
        return Err(NO_PATH);
    };
    path.map(Uri::from).map_err(|_| NO_PATH)
}

/// Removes the fields that concern one connection: the standard ones, and all that `Connection`
/// names.
pub(crate) fn remove_hop_by_hop(fields: &mut HeaderMap) {
    let named: Vec<HeaderName> = fields
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect();
    for name in named.iter().chain(&[CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE]) {
        fields.remove(name);
    }
    fields.remove("keep-alive");
    remove_where(fields, |name| name == "proxy" || name.starts_with("proxy-"));
}

/// Removes fields about earlier hops, which a client may have forged.
fn remove_forwarded(fields: &mut HeaderMap) {
    fields.remove(FORWARDED);
    remove_where(fields, |name| name == "x-real-ip" || name.starts_with("x-forwarded-"));
}

fn remove_where(fields: &mut HeaderMap, is_one: impl Fn(&str) -> bool) {
    let names: Vec<HeaderName> =
        fields.keys().filter(|name| is_one(name.as_str())).cloned().collect();
    for name in names {
        fields.remove(name);
    }
}

/// The element for this hop, according to RFC 7239.
fn forwarded(client: IpAddr, host: Option<&Authority>) -> HeaderValue {
    let client = match client.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("\"[{address}]\""),
    };
    let host = host.map(|host| format!(";host=\"{host}\"")).unwrap_or_default();
    let element = format!("for={client}{host};proto=http");
    HeaderValue::from_str(&element).expect("addresses and authorities are visible ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(head: hyper::http::request::Builder) -> Result<Request, Refusal> {
        let origin = Origin { client: IpAddr::from([192, 0, 2, 7]), trusted: false };
        let (head, ()) = head.body(()).unwrap().into_parts();
        Request::check(head, origin)
    }

    fn get(target: &str) -> hyper::http::request::Builder {
        hyper::Request::get(target)
    }

    fn field<'a>(request: &'a Request, name: &str) -> Vec<&'a str> {
        request.fields.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
    }

    /// Goal: fields that concern the client's connection are not passed on, including fields that
    /// it names itself.
    #[test]
    fn hop_by_hop_fields_are_removed() {
        let head = get("/a?b")
            .header("host", "a:80")
            .header("connection", "close, X-Own , keep-alive")
            .header("connection", "x-more")
            .header("x-own", "1")
            .header("x-more", "2")
            .header("keep-alive", "timeout=5")
            .header("proxy-authorization", "Basic x")
            .header("proxy", "http://evil/")
            .header("te", "trailers")
            .header("trailer", "x")
            .header("expect", "100-continue")
            .header("accept", "*/*");
        let request = check(head).unwrap();
        let mut names: Vec<&str> = request.fields.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "forwarded", "host"]);
        assert_eq!(request.target, "/a?b");
    }

    /// Goal: a request has exactly one host. A target in absolute form decides.
    #[test]
    fn a_request_has_one_host() {
        for (head, status) in [
            (get("/"), 400),
            (get("/").header("host", "a").header("host", "a"), 400),
            (get("/").header("host", "a b"), 400),
            (get("/").header("host", "me@a"), 400),
            (get("/").header("host", ""), 400),
            (get("ftp://a/").header("host", "a"), 400),
            (get("*").header("host", "a"), 400),
            (get("/").header("host", "a").header("upgrade", "h2c"), 501),
            (get("/").header("host", "a").header("transfer-encoding", "gzip, chunked"), 501),
            (hyper::Request::connect("a:80").header("host", "a"), 501),
        ] {
            let refused = check(head).map_err(|Refusal(status, _)| status.as_u16());
            assert_eq!(refused.unwrap_err(), status);
        }
        let absolute = check(get("http://good:81?x").header("host", "evil")).unwrap();
        assert_eq!(field(&absolute, "host"), ["good:81"]);
        assert_eq!(absolute.target, "/?x");
        let bare = check(get("http://good#/?x").header("host", "good")).unwrap();
        assert_eq!(bare.target.to_string(), "/");
        let old = check(get("/").version(Version::HTTP_10)).unwrap();
        assert!(old.fields.get("host").is_none());
        let all = hyper::Request::options("*").header("host", "a");
        assert_eq!(check(all).unwrap().target, "*");
    }

    /// Goal: a client cannot claim another address, unless clients are trusted.
    #[test]
    fn forwarded_is_the_proxys_own() {
        let head = || {
            get("/")
                .header("host", "a:80")
                .header("forwarded", "for=10.0.0.1")
                .header("x-forwarded-for", "10.0.0.1")
                .header("x-real-ip", "10.0.0.1")
        };
        let own = "for=192.0.2.7;host=\"a:80\";proto=http";
        let request = check(head()).unwrap();
        assert_eq!(field(&request, "forwarded"), [own]);
        assert!(field(&request, "x-forwarded-for").is_empty());
        assert!(field(&request, "x-real-ip").is_empty());
        let client = "2001:db8::1".parse().unwrap();
        let (head, ()) = head().body(()).unwrap().into_parts();
        let request = Request::check(head, Origin { client, trusted: true }).unwrap();
        let own = "for=\"[2001:db8::1]\";host=\"a:80\";proto=http";
        assert_eq!(field(&request, "forwarded"), ["for=10.0.0.1", own]);
        assert_eq!(field(&request, "x-forwarded-for"), ["10.0.0.1"]);
    }
}
