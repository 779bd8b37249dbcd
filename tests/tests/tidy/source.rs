//! Source files as text: what is code, what is a comment, and what is for tests.

/// The code of a file: without comments, the text of string literals, and items for tests.
pub(crate) fn code(text: &str) -> String {
    let mut code = String::new();
    for part in parts(text) {
        match part {
            Part::Code(_, text) => code.push_str(text),
            Part::Comment(..) => {}
            Part::Literal(..) => code.push_str("\"\""),
        }
    }
    without_tests(&code)
}

fn without_tests(code: &str) -> String {
    let mut pieces = code.split("#[cfg(test)]");
    let mut shipped = pieces.next().unwrap_or_default().to_owned();
    pieces.for_each(|piece| shipped.push_str(&piece[item_len(piece)..]));
    shipped
}

/// Length of the item, the field or the match arm that `code` begins with.
fn item_len(code: &str) -> usize {
    let keywords =
        ["const", "enum", "fn", "impl", "mod", "static", "struct", "trait", "type", "use"];
    let head = code.split(['{', ';', ',']).next().unwrap_or_default();
    let is_item = head.split_whitespace().any(|word| keywords.contains(&word));
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(c) = code.as_bytes().get(at) {
        match c {
            b'\'' => {
                at += char_len(&code[at..]);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth == 0 => return at,
            b'}' if depth == 1 => return at + 1,
            b')' | b']' | b'}' => depth -= 1,
            b';' if depth == 0 => return at + 1,
            b',' if depth == 0 && !is_item => return at + 1,
            _ => {}
        }
        at += 1;
    }
    at
}

/// A part of a source file, with the number of its first line.
pub(crate) enum Part<'a> {
    Code(usize, &'a str),
    Comment(usize, &'a str),
    Literal(usize, &'a str),
}

/// Splits a source file into code, comments and string literals.
pub(crate) fn parts(text: &str) -> Vec<Part<'_>> {
    let (mut parts, mut rest, mut line) = (Vec::new(), text, 1);
    while !rest.is_empty() {
        let code = code_len(rest);
        parts.push(Part::Code(line, &rest[..code]));
        let after = &rest[code..];
        line += rest[..code].matches('\n').count();
        let other = if after.starts_with("//") {
            let len = after.find('\n').unwrap_or(after.len());
            parts.push(Part::Comment(line, &after[..len]));
            len
        } else {
            let len = literal_len(after);
            parts.push(Part::Literal(line, &after[..len]));
            len
        };
        line += after[..other].matches('\n').count();
        rest = &after[other..];
    }
    parts
}

/// Length of the code before the next comment or string literal.
fn code_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        match rest[0] {
            b'"' => return at,
            b'/' if rest.starts_with(b"//") => return at,
            b'r' | b'b' if !ends_in_name(&bytes[..at]) && begins_literal(rest) => return at,
            b'\'' => at += char_len(&text[at..]),
            _ => at += 1,
        }
    }
    at
}

fn ends_in_name(code: &[u8]) -> bool {
    code.last().is_some_and(|last| last.is_ascii_alphanumeric() || *last == b'_')
}

/// Whether a raw or a byte string begins here.
fn begins_literal(code: &[u8]) -> bool {
    let prefix = code.iter().take_while(|c| matches!(c, b'r' | b'b' | b'#')).count();
    code.get(prefix) == Some(&b'"')
}

/// Length of the character literal, or of the quote of a lifetime, that `text` begins with.
fn char_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    let is_escaped = chars.next().is_some_and(|(_, c)| c == '\\');
    let mut after = chars.skip(usize::from(is_escaped));
    match after.next() {
        Some((at, '\'')) => at + 1,
        // A code such as `\u{1f600}`.
        Some(_) if is_escaped => text[2..].find('\'').map_or(1, |at| 2 + at + 1),
        _ => 1,
    }
}

/// Length of the string literal that `text` begins with.
fn literal_len(text: &str) -> usize {
    let open = text.find('"').unwrap_or(0);
    if text[..open].contains('r') {
        let close = format!("\"{}", "#".repeat(text[..open].matches('#').count()));
        return text[open + 1..].find(&close).map_or(text.len(), |at| open + 1 + at + close.len());
    }
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip_while(|(at, _)| *at <= open) {
        match c {
            '"' if !is_escaped => return at + 1,
            _ => is_escaped = c == '\\' && !is_escaped,
        }
    }
    text.len()
}
