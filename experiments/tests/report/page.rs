//! A rendered report, parsed as XML: every test that reads one holds that it is well-formed.

use experiments::report::Report;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

/// An element, its text among its children.
#[derive(Clone, Debug, Default)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) attributes: Vec<(String, String)>,
    pub(crate) text: String,
    pub(crate) children: Vec<Node>,
}

impl Node {
    pub(crate) fn attribute(&self, name: &str) -> &str {
        let found = self.attributes.iter().find(|(key, _)| key == name);
        found.map_or("", |(_, value)| value)
    }

    pub(crate) fn has_class(&self, class: &str) -> bool {
        self.attribute("class").split(' ').any(|one| one == class)
    }

    /// This element and all below it, in the order of the file.
    pub(crate) fn all(&self) -> Vec<&Node> {
        let below = self.children.iter().flat_map(Node::all);
        std::iter::once(self).chain(below).collect()
    }

    pub(crate) fn named(&self, name: &str) -> Vec<&Node> {
        self.all().into_iter().filter(|node| node.name == name).collect()
    }

    pub(crate) fn of_class(&self, class: &str) -> Vec<&Node> {
        self.all().into_iter().filter(|node| node.has_class(class)).collect()
    }
}

/// The report's bytes and its elements.
pub(crate) fn render(report: &Report) -> (String, Node) {
    let mut html = Vec::new();
    report.render(&mut html).expect("a vector takes everything");
    let html = String::from_utf8(html).expect("reports are UTF-8");
    let root = parse(&html).unwrap_or_else(|error| panic!("{error}\n{html}"));
    (html, root)
}

fn parse(html: &str) -> Result<Node, String> {
    let mut reader = Reader::from_str(html);
    let mut open = vec![Node::default()];
    loop {
        match reader.read_event().map_err(|error| error.to_string())? {
            Event::Start(start) => open.push(node(&start)?),
            Event::Empty(start) => {
                let node = node(&start)?;
                open.last_mut().ok_or("nothing is open")?.children.push(node);
            }
            Event::End(_) => {
                let done = open.pop().ok_or("nothing is open")?;
                open.last_mut().ok_or("an end without a start")?.children.push(done);
            }
            Event::Text(text) => {
                open.last_mut().ok_or("nothing is open")?.text += &text;
            }
            Event::GeneralRef(entity) => {
                let c = named(&entity).ok_or_else(|| format!("no entity {entity:?}"))?;
                open.last_mut().ok_or("nothing is open")?.text.push(c);
            }
            Event::Eof => break,
            Event::DocType(_) => {}
            other => return Err(format!("no place for {other:?}")),
        }
    }
    let root = open.pop().ok_or("nothing at all")?;
    if open.is_empty() { Ok(root) } else { Err(format!("{} is never closed", root.name)) }
}

fn node(start: &BytesStart<'_>) -> Result<Node, String> {
    let name = start.name().as_ref().to_owned();
    let mut attributes = Vec::new();
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| format!("{name}: {error}"))?;
        let key = attribute.key.as_ref().to_owned();
        let value = attribute.value.clone().into_owned();
        attributes.push((key, value));
    }
    Ok(Node { name, attributes, ..Node::default() })
}

fn named(entity: &str) -> Option<char> {
    Some(match entity {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "#39" => '\'',
        _ => return None,
    })
}

/// A figure's CSV, as its link holds it, without the heading.
pub(crate) fn csv_of(figure: &Node) -> Vec<Vec<String>> {
    let link = figure.named("a").into_iter().find(|a| !a.attribute("download").is_empty());
    let uri = link.expect("every figure has its numbers").attribute("href");
    let coded = uri.strip_prefix("data:text/csv;charset=utf-8,").expect("a data URI");
    let rows = rows(&decoded(coded));
    assert_eq!(rows[0].len(), 6, "{:?}", rows[0]);
    rows[1..].to_vec()
}

fn decoded(coded: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = coded.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let hex = [rest.next(), rest.next()].map(|digit| digit.expect("two digits"));
        let hex = std::str::from_utf8(&hex).expect("digits");
        bytes.push(u8::from_str_radix(hex, 16).expect("hexadecimal"));
    }
    String::from_utf8(bytes).expect("UTF-8")
}

/// The fields of a CSV, by RFC 4180.
fn rows(csv: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut field, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut rest = csv.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '"' if quoted && rest.peek() == Some(&'"') => {
                rest.next();
                field.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(std::mem::take(&mut field)),
            '\r' if !quoted && rest.peek() == Some(&'\n') => {
                rest.next();
                row.push(std::mem::take(&mut field));
                rows.push(std::mem::take(&mut row));
            }
            c => field.push(c),
        }
    }
    assert!(field.is_empty() && row.is_empty() && !quoted, "the last line has its end");
    rows
}
