//! Listings of stores without the objects whose keys can't be used.
//!
//! The client refuses a whole listing for one key with an empty component, `.` or `..`. So such
//! entries are taken out of the stores' answers before the client parses them. Objects whose keys
//! end with a slash stand for folders and are excluded silently.

use std::cell::RefCell;
use std::time::Duration;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};

use super::keys::parse_key;
use super::limits::Limited;

/// Connects to stores.
#[derive(Debug)]
pub(super) struct Connector {
    /// Longest time in which a store sends nothing.
    pub(super) idle: Duration,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = HttpClient::new(Limited::connect(options, self.idle)?);
        Ok(HttpClient::new(Usable(client)))
    }
}

/// A client whose listings have usable keys alone.
#[derive(Debug)]
struct Usable(HttpClient);

#[async_trait]
impl HttpService for Usable {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let query = request.uri().query().unwrap_or_default();
        let is_listing = query.split('&').any(|pair| LISTINGS.contains(&pair));
        let response = self.0.execute(request).await?;
        if !is_listing || !response.status().is_success() {
            return Ok(response);
        }
        let (head, body) = response.into_parts();
        let body = body.bytes().await?;
        let Ok(text) = std::str::from_utf8(&body) else {
            return Ok(HttpResponse::from_parts(head, body.into()));
        };
        let (kept, left_out) = usable(text);
        // Outside of `noting_left_out` no caller asks for them.
        let _ = LEFT_OUT.try_with(|all| all.borrow_mut().extend(left_out));
        Ok(HttpResponse::from_parts(head, kept.into()))
    }
}

/// The result of `list`, and the keys that were excluded from the listings that it requested.
pub(super) async fn noting_left_out<T, E>(
    list: impl Future<Output = Result<T, E>>,
) -> Result<(T, Vec<String>), E> {
    let noted = async {
        let listed = list.await?;
        Ok((listed, LEFT_OUT.with(RefCell::take)))
    };
    LEFT_OUT.scope(RefCell::default(), noted).await
}

/// The listing without entries whose keys can't be used, and their keys.
fn usable(listing: &str) -> (String, Vec<String>) {
    let (mut kept, mut left_out) = (String::with_capacity(listing.len()), Vec::new());
    let mut rest = listing;
    while let Some((before, entry, key, after)) = ENTRIES.iter().find_map(|tags| next(rest, tags)) {
        kept.push_str(before);
        match parse_key(&key) {
            Ok(_) if !key.ends_with('/') => kept.push_str(entry),
            Ok(_) => {}
            Err(_) => left_out.push(key),
        }
        rest = after;
    }
    kept.push_str(rest);
    (kept, left_out)
}

/// What precedes the first entry, the entry, its key, and what follows it.
fn next<'a>(
    text: &'a str,
    [entry, name]: &[&str; 2],
) -> Option<(&'a str, &'a str, String, &'a str)> {
    let begins = text.find(&format!("<{entry}>"))?;
    let close = format!("</{entry}>");
    let ends = begins + text[begins..].find(&close)? + close.len();
    let within = &text[begins..ends];
    let (_, key) = within.split_once(&format!("<{name}>"))?;
    let (key, _) = key.split_once(&format!("</{name}>"))?;
    Some((&text[..begins], within, unescape(key), &text[ends..]))
}

/// The text that `xml` stands for.
fn unescape(xml: &str) -> String {
    let mut text = String::with_capacity(xml.len());
    let mut rest = xml;
    while let Some((before, after)) = rest.split_once('&') {
        text.push_str(before);
        let Some((name, after)) = after.split_once(';') else {
            text.push('&');
            rest = after;
            continue;
        };
        let number = name.strip_prefix('#').map(|digits| match digits.strip_prefix('x') {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => digits.parse(),
        });
        let character = match (name, number) {
            ("amp", _) => '&',
            ("apos", _) => '\'',
            ("gt", _) => '>',
            ("lt", _) => '<',
            ("quot", _) => '"',
            (_, Some(Ok(number))) => char::from_u32(number).unwrap_or('\0'),
            _ => '\0',
        };
        text.push(character);
        rest = after;
    }
    text + rest
}

tokio::task_local! {
    /// The keys that were excluded from the listings of this task.
    static LEFT_OUT: RefCell<Vec<String>>;
}

/// The entries of a listing and the element with their key: S3 and Google Cloud Storage; Azure.
const ENTRIES: [[&str; 2]; 2] = [["Contents", "Key"], ["Blob", "Name"]];
/// Parameters of requests for listings.
const LISTINGS: [&str; 2] = ["list-type=2", "comp=list"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_with_keys_that_cannot_be_used_are_taken_out_of_a_listing() {
        let entry = |key: &str| format!("<Contents><Size>1</Size><Key>{key}</Key></Contents>");
        let (head, end) = ("<List><Prefix>k//</Prefix>", "<IsTruncated>false</IsTruncated></List>");
        let good = ["a b", "a&amp;b/&lt;", "ü/😀", "..a/b.", "a%20#?*~[]", "&#x41;"].map(entry);
        let odd = ["a//b", "/a", "./x", "a/../b", "a/.", "a&#10;b", "a//"].map(entry);
        let marker = entry("folder/");
        let listing = format!("{head}{}{marker}{}{end}", good[..3].concat(), odd.concat());
        let listing = listing.replace(end, &format!("{}{end}", good[3..].concat()));
        let (kept, left_out) = usable(&listing);
        assert_eq!(kept, format!("{head}{}{end}", good.concat()));
        assert_eq!(left_out, ["a//b", "/a", "./x", "a/../b", "a/.", "a\nb", "a//"]);
        let azure = "<Blobs><Blob><Name>a//b</Name></Blob><Blob><Name>c</Name></Blob></Blobs>";
        assert_eq!(usable(azure).0, "<Blobs><Blob><Name>c</Name></Blob></Blobs>");
        for text in ["", "<Contents>", "<Contents></Contents>", "<Contents><Key>a</Contents>"] {
            assert_eq!(usable(text).0, text);
        }
    }
}
