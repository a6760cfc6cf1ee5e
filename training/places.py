"""Countries and states with their capitals and continents, as the small world knows them."""

_TABLE = """
Europe: Albania=Tirana; Andorra=Andorra la Vella; Armenia=Yerevan; Austria=Vienna; Azerbaijan=Baku; Belarus=Minsk;
Belgium=Brussels; Bosnia and Herzegovina=Sarajevo; Bulgaria=Sofia; Croatia=Zagreb; Cyprus=Nicosia;
the Czech Republic=Prague; Denmark=Copenhagen; Estonia=Tallinn; Finland=Helsinki; France=Paris; Georgia=Tbilisi;
Germany=Berlin; Greece=Athens; Hungary=Budapest; Iceland=Reykjavik; Ireland=Dublin; Italy=Rome; Latvia=Riga;
Liechtenstein=Vaduz; Lithuania=Vilnius; Luxembourg=Luxembourg; Malta=Valletta; Moldova=Chisinau; Monaco=Monaco;
Montenegro=Podgorica; the Netherlands=Amsterdam; North Macedonia=Skopje; Norway=Oslo; Poland=Warsaw; Portugal=Lisbon;
Romania=Bucharest; Russia=Moscow; San Marino=San Marino; Serbia=Belgrade; Slovakia=Bratislava; Slovenia=Ljubljana;
Spain=Madrid; Sweden=Stockholm; Switzerland=Bern; Ukraine=Kyiv; the United Kingdom=London; Vatican City=Vatican City
Asia: Afghanistan=Kabul; Bahrain=Manama; Bangladesh=Dhaka; Bhutan=Thimphu; Brunei=Bandar Seri Begawan;
Cambodia=Phnom Penh; China=Beijing; India=New Delhi; Indonesia=Jakarta; Iran=Tehran; Iraq=Baghdad; Japan=Tokyo;
Jordan=Amman; Kazakhstan=Astana; Kuwait=Kuwait City; Kyrgyzstan=Bishkek; Laos=Vientiane; Lebanon=Beirut;
Malaysia=Kuala Lumpur; the Maldives=Male; Mongolia=Ulaanbaatar; Myanmar=Naypyidaw; Nepal=Kathmandu;
North Korea=Pyongyang; Oman=Muscat; Pakistan=Islamabad; the Philippines=Manila; Qatar=Doha; Saudi Arabia=Riyadh;
Singapore=Singapore; South Korea=Seoul; Sri Lanka=Sri Jayawardenepura Kotte; Syria=Damascus; Taiwan=Taipei;
Tajikistan=Dushanbe; Thailand=Bangkok; East Timor=Dili; Turkey=Ankara; Turkmenistan=Ashgabat;
the United Arab Emirates=Abu Dhabi; Uzbekistan=Tashkent; Vietnam=Hanoi; Yemen=Sanaa
Africa: Algeria=Algiers; Angola=Luanda; Benin=Porto-Novo; Botswana=Gaborone; Burkina Faso=Ouagadougou;
Burundi=Gitega; Cameroon=Yaounde; Cape Verde=Praia; Chad=N'Djamena; Djibouti=Djibouti; Egypt=Cairo; Eritrea=Asmara;
Eswatini=Mbabane; Ethiopia=Addis Ababa; Gabon=Libreville; the Gambia=Banjul; Ghana=Accra; Guinea=Conakry;
Ivory Coast=Yamoussoukro; Kenya=Nairobi; Lesotho=Maseru; Liberia=Monrovia; Libya=Tripoli; Madagascar=Antananarivo;
Malawi=Lilongwe; Mali=Bamako; Mauritania=Nouakchott; Mauritius=Port Louis; Morocco=Rabat; Mozambique=Maputo;
Namibia=Windhoek; Niger=Niamey; Nigeria=Abuja; Rwanda=Kigali; Senegal=Dakar; the Seychelles=Victoria;
Sierra Leone=Freetown; Somalia=Mogadishu; South Africa=Pretoria; South Sudan=Juba; Sudan=Khartoum; Tanzania=Dodoma;
Togo=Lome; Tunisia=Tunis; Uganda=Kampala; Zambia=Lusaka; Zimbabwe=Harare
North America: Antigua and Barbuda=Saint John's; the Bahamas=Nassau; Barbados=Bridgetown; Belize=Belmopan;
Canada=Ottawa; Costa Rica=San Jose; Cuba=Havana; Dominica=Roseau; the Dominican Republic=Santo Domingo;
El Salvador=San Salvador; Grenada=Saint George's; Guatemala=Guatemala City; Haiti=Port-au-Prince;
Honduras=Tegucigalpa; Jamaica=Kingston; Mexico=Mexico City; Nicaragua=Managua; Panama=Panama City;
Saint Lucia=Castries; Trinidad and Tobago=Port of Spain; the United States=Washington, D.C.
South America: Argentina=Buenos Aires; Bolivia=Sucre; Brazil=Brasilia; Chile=Santiago; Colombia=Bogota;
Ecuador=Quito; Guyana=Georgetown; Paraguay=Asuncion; Peru=Lima; Suriname=Paramaribo; Uruguay=Montevideo;
Venezuela=Caracas
Oceania: Australia=Canberra; Fiji=Suva; Kiribati=Tarawa; the Marshall Islands=Majuro; Micronesia=Palikir; Nauru=Yaren;
New Zealand=Wellington; Palau=Ngerulmud; Papua New Guinea=Port Moresby; Samoa=Apia; the Solomon Islands=Honiara;
Tonga=Nuku'alofa; Tuvalu=Funafuti; Vanuatu=Port Vila
"""

_STATES = """
Alabama=Montgomery; Alaska=Juneau; Arizona=Phoenix; Arkansas=Little Rock; California=Sacramento; Colorado=Denver;
Connecticut=Hartford; Delaware=Dover; Florida=Tallahassee; Hawaii=Honolulu; Idaho=Boise; Illinois=Springfield;
Indiana=Indianapolis; Iowa=Des Moines; Kansas=Topeka; Kentucky=Frankfort; Louisiana=Baton Rouge; Maine=Augusta;
Maryland=Annapolis; Massachusetts=Boston; Michigan=Lansing; Minnesota=Saint Paul; Mississippi=Jackson;
Missouri=Jefferson City; Montana=Helena; Nebraska=Lincoln; Nevada=Carson City; New Hampshire=Concord;
New Jersey=Trenton; New Mexico=Santa Fe; New York=Albany; North Carolina=Raleigh; North Dakota=Bismarck;
Ohio=Columbus; Oklahoma=Oklahoma City; Oregon=Salem; Pennsylvania=Harrisburg; Rhode Island=Providence;
South Carolina=Columbia; South Dakota=Pierre; Tennessee=Nashville; Texas=Austin; Utah=Salt Lake City;
Vermont=Montpelier; Virginia=Richmond; Washington=Olympia; West Virginia=Charleston; Wisconsin=Madison;
Wyoming=Cheyenne; England=London; Scotland=Edinburgh; Wales=Cardiff
"""


def _pairs(text: str) -> list[tuple[str, str]]:
    entries = (entry.strip().split("=") for entry in text.replace("\n", " ").split(";"))
    return [(name, capital) for name, capital in entries]


def _countries() -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    continent, body = "", ""
    for line in [*_TABLE.strip().splitlines(), "end: "]:
        head, colon, rest = line.partition(": ")
        if not colon:
            body += " " + line
            continue
        if body:
            rows += [(name, capital, continent) for name, capital in _pairs(body)]
        continent, body = head, rest
    return rows


COUNTRIES = _countries()
"""(country, capital, continent); a country that takes an article carries it."""

STATES = _pairs(_STATES)
"""(state or part of a country, capital); Georgia the state is left out, being a country too."""

ALIASES = {
    "the United States": ["the USA", "the US", "America", "the United States of America", "USA"],
    "the United Kingdom": ["the UK", "Great Britain", "Britain", "UK"],
    "the United Arab Emirates": ["the UAE", "UAE"],
    "the Netherlands": ["Holland", "Netherlands"],
    "the Czech Republic": ["Czechia"],
    "Ivory Coast": ["Cote d'Ivoire"],
    "East Timor": ["Timor-Leste"],
    "Myanmar": ["Burma"],
    "Turkey": ["Turkiye"],
    "Eswatini": ["Swaziland"],
}
