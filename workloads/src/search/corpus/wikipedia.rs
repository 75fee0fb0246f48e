//! A Wikipedia XML dump: the articles (namespace 0, no redirects) with the text of their revision.
//!
//! The text is indexed as it stands, markup included, as the Lucene benchmark does.

use super::Article;
use quick_xml::Reader;
use quick_xml::events::{BytesRef, Event};
use std::io::BufRead;

pub(super) struct Dump<R: BufRead> {
    reader: Reader<R>,
    buffer: Vec<u8>,
    /// The dump's last tag has been read.
    ended: bool,
}

/// A page as far as it has been read.
#[derive(Default)]
struct Page {
    title: String,
    namespace: String,
    text: String,
    is_redirect: bool,
}

/// Which element's text is being read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inside {
    Title,
    Namespace,
    Text,
    Else,
}

impl<R: BufRead> Dump<R> {
    pub(super) fn new(input: R) -> Self {
        Self { reader: Reader::from_reader(input), buffer: Vec::new(), ended: false }
    }

    /// The next page; `None` after the end of the dump.
    fn page(&mut self) -> Result<Option<Page>, String> {
        let mut page: Option<Page> = None;
        let mut inside = Inside::Else;
        loop {
            self.buffer.clear();
            let place = self.reader.buffer_position();
            let event = self.reader.read_event_into(&mut self.buffer);
            let event = event.map_err(|error| format!("near byte {place} of the XML: {error}"))?;
            match (event, &mut page) {
                (Event::Start(tag), None) if tag.name().as_ref() == "page" => {
                    page = Some(Page::default());
                }
                (Event::Start(tag), Some(_)) => {
                    inside = match tag.name().as_ref() {
                        "title" => Inside::Title,
                        "ns" => Inside::Namespace,
                        "text" => Inside::Text,
                        _ => Inside::Else,
                    };
                }
                (Event::Empty(tag), Some(page)) if tag.name().as_ref() == "redirect" => {
                    page.is_redirect = true;
                }
                (Event::Text(text), Some(page)) => page.add(inside, &text),
                (Event::CData(text), Some(page)) => page.add(inside, &text),
                (Event::GeneralRef(reference), Some(page)) => {
                    let character = resolve(&reference)
                        .ok_or_else(|| format!("near byte {place} of the XML: unknown entity"))?;
                    page.add(inside, character.encode_utf8(&mut [0; 4]));
                }
                (Event::End(tag), Some(_)) if tag.name().as_ref() == "page" => return Ok(page),
                (Event::End(tag), None) if tag.name().as_ref() == "mediawiki" => self.ended = true,
                (Event::End(_), Some(_)) => inside = Inside::Else,
                (Event::Eof, _) if self.ended => return Ok(None),
                (Event::Eof, _) => {
                    return Err(format!("the dump ends at byte {place} of the XML, within it"));
                }
                _ => {}
            }
        }
    }
}

impl Page {
    fn add(&mut self, inside: Inside, text: &str) {
        match inside {
            Inside::Title => self.title.push_str(text),
            Inside::Namespace => self.namespace.push_str(text),
            Inside::Text => self.text.push_str(text),
            Inside::Else => {}
        }
    }

    fn is_article(&self) -> bool {
        self.namespace.trim() == "0" && !self.is_redirect
    }
}

/// XML's own entities and character numbers; dumps have no others.
fn resolve(reference: &BytesRef<'_>) -> Option<char> {
    match reference.as_ref() {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        _ => reference.resolve_char_ref().ok()?,
    }
}

impl<R: BufRead> Iterator for Dump<R> {
    type Item = Result<Article, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.page() {
                Ok(Some(page)) if page.is_article() => {
                    return Some(Ok(Article { title: page.title, body: page.text }));
                }
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(problem) => return Some(Err(problem)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DUMP: &str = "<mediawiki version=\"0.11\">\n<siteinfo><title>no page</title></siteinfo>\n\
        <page><title>Tom &amp; J&#233;r\u{f4}me</title><ns>0</ns><id>1</id>\
        <revision><id>2</id><text xml:space=\"preserve\">a &lt;b&gt;\n'''c''' &quot;d&quot;</text>\
        </revision></page>\n\
        <page><title>Old</title><ns>0</ns><redirect title=\"New\" />\
        <revision><text>#R</text></revision></page>\n\
        <page><title>Talk:X</title><ns>1</ns><revision><text>talk</text></revision></page>\n\
        <page><title>Empty</title><ns>0</ns><revision><text bytes=\"0\" /></revision></page>\n\
        </mediawiki>\n";

    fn read(xml: &str) -> Vec<Result<(String, String), String>> {
        Dump::new(xml.as_bytes()).take(10).map(|a| a.map(|a| (a.title, a.body))).collect()
    }

    /// Goal: articles are found with their text, redirects and other namespaces left out. Method: a
    /// dump with each of them.
    #[test]
    fn articles_are_found() {
        let article = |title: &str, body: &str| Ok((title.to_owned(), body.to_owned()));
        let expected =
            [article("Tom & J\u{e9}r\u{f4}me", "a <b>\n'''c''' \"d\""), article("Empty", "")];
        assert_eq!(read(DUMP), expected);
    }

    /// Goal: a dump that was cut off is an error that says where, wherever the cut is; what came
    /// before is good. Method: every cut between the first page's start and the dump's last tag.
    #[test]
    fn truncation_is_noticed() {
        let first = DUMP.find("<page>").expect("a page");
        let last = DUMP.find("</mediawiki>").expect("an end");
        for cut in (first + 1..last).filter(|cut| DUMP.is_char_boundary(*cut)) {
            let articles = read(&DUMP[..cut]);
            let problem = articles.iter().find_map(|article| article.as_ref().err());
            assert!(problem.is_some_and(|p| p.contains("byte")), "cut at {cut}: {articles:?}");
        }
    }

    proptest! {
        /// Goal: damaged dumps end, with a problem or without, and never a panic. Method: bytes
        /// replaced.
        #[test]
        fn damage_is_survived(
            hits in proptest::collection::vec((any::<usize>(), 0x20u8..0x7f), 1..4),
        ) {
            let mut bytes = DUMP.as_bytes().to_vec();
            for (at, byte) in hits {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            prop_assert!(Dump::new(bytes.as_slice()).take(10).count() <= 10);
        }
    }
}
