//! The dashboard's page of a job, as a program uses it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::Value;

/// The page of a running job.
#[derive(Clone, Debug)]
pub struct Page {
    /// Its link, with the key.
    pub link: String,
    /// Address and port of its server.
    pub address: String,
    /// The key of those who may use it.
    pub key: String,
}

impl Page {
    /// The page at a link, as `elasticdl dashboard` prints it.
    pub fn at(link: &str) -> Self {
        let rest = link.strip_prefix("http://").unwrap_or_else(|| panic!("{link} is no link"));
        let (address, key) = rest.split_once("/#").expect("a link has a key");
        Self { link: link.to_owned(), address: address.to_owned(), key: key.to_owned() }
    }

    /// Sends a request for `host` with this key; returns the status code and the body.
    pub fn ask(&self, request: &str, (host, key): (&str, &str), body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("the page is served");
        let authorization =
            if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") };
        let len = body.len();
        let request = format!(
            "{request} HTTP/1.1\r\nhost: {host}\r\n{authorization}content-type: \
             application/json\r\ncontent-length: {len}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).expect("the server reads requests");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers");
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (code.unwrap_or_else(|| panic!("no status code: {head}")), body.to_owned())
    }

    /// Posts a command with the key; returns the status code.
    pub fn post(&self, path: &str, body: &str) -> u16 {
        self.ask(&format!("POST {path}"), (&self.address, &self.key), body).0
    }

    /// The job as the page sees it.
    pub fn job(&self) -> Value {
        let (code, body) = self.ask("GET /api/job", (&self.address, &self.key), "");
        assert_eq!(code, 200, "{body}");
        serde_json::from_str(&body).expect("a job is JSON")
    }
}
